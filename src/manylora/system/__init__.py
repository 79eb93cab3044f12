"""The process: its threads, memory, compiler and parent. Nothing here depends on models or adapters."""
