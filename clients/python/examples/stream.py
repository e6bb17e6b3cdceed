"""Continue a prompt, printing the text as it comes: python stream.py [PROMPT] [--endpoint ADDR]."""

import argparse

from xllm_client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--endpoint", help="unix:PATH or HOST:PORT; by default your own server's socket")
    arguments = parser.parse_args()
    with Client(arguments.endpoint) as client:
        client.wait_ready(timeout_s=10)
        for event in client.generate(arguments.prompt, max_tokens=32):
            print(event.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
