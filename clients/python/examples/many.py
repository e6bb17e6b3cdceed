"""Run several prompts at once with asyncio: python many.py [PROMPT ...] [--endpoint ADDR]."""

import argparse
import asyncio

from xllm_client import AsyncClient, XllmError


async def answer(client: AsyncClient, prompt: str) -> str:
    """Return one line about one prompt; a failure is its own line and does not disturb the others."""
    try:
        result = await client.generate_once(prompt, max_tokens=16, timeout_s=60)
    except XllmError as error:
        return f"{prompt!r} failed: {error}"
    tokens = result.usage.num_generated_tokens
    return f"{prompt!r} -> {result.text!r} ({tokens} tokens, {result.finish_reason})"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", default=["One, two,", "Red, green,", "Do, re,"])
    parser.add_argument("--endpoint", help="unix:PATH or HOST:PORT; by default your own server's socket")
    arguments = parser.parse_args()
    async with AsyncClient(arguments.endpoint) as client:
        for line in await asyncio.gather(*(answer(client, prompt) for prompt in arguments.prompts)):
            print(line)


if __name__ == "__main__":
    asyncio.run(main())
