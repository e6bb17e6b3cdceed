"""What `xllm bench` measures, and how. The words are those of the manual's page on measurements."""
