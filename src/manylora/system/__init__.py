"""The process: its threads, memory, compiler and parent. Nothing here knows of models or adapters."""
