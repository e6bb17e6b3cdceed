"""Client of xLLM: streams tokens of GGUF models over gRPC."""
