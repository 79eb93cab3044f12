"""Text models of other projects' Triton repositories, implemented on the model `tensorrt_llm`."""
