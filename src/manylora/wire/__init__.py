"""The Triton contract: the models' tensors and parameters, and how they become requests and responses."""
