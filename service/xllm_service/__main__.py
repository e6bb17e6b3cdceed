"""`python -m xllm_service` is `xllm`."""

from xllm_service.cli.main import main

if __name__ == "__main__":
    main()
