"""Generated messages and stubs of the contract, package `xllm.v1`; the protos are their documentation."""
