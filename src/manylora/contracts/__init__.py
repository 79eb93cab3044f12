"""Text models of other projects' Triton repositories, over the model `tensorrt_llm`."""
