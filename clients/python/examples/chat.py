"""Hold a conversation: python chat.py [--endpoint ADDR]; a line is a turn, an empty one ends it."""

import argparse

from xllm_client import Client, InvalidArgumentError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", help="unix:PATH or HOST:PORT; by default your own server's socket")
    arguments = parser.parse_args()
    messages: list[dict[str, str]] = []
    with Client(arguments.endpoint) as client:
        while line := read_line():
            messages.append({"role": "user", "content": line})
            with client.chat(messages, temperature=0.7, max_tokens=256) as generation:
                try:
                    for event in generation:
                        print(event.text, end="", flush=True)
                except InvalidArgumentError as error:  # the conversation no longer fits, for example
                    print(f"refused: {error}")
                    return
                print()
                messages.append({"role": "assistant", "content": generation.result().text})


def read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
