"""The xLLM server: GGUF models over gRPC, and the `xllm` command line."""
