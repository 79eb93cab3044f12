"""The Triton contract: the models' tensors and parameters, and their conversion to requests and responses."""
