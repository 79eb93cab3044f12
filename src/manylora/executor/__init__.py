"""The path that TensorRT-LLM has requests at."""
