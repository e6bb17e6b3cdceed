"""Show what a server is and serves: python inspect_server.py [--endpoint ADDR]."""

import argparse

from xllm_client import Client, DecodeMode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", help="unix:PATH or HOST:PORT; by default your own server's socket")
    arguments = parser.parse_args()
    with Client(arguments.endpoint) as client:
        info = client.server_info()
        print(f"xLLM {info.version}, contract revision {info.schema_revision}")
        for summary in client.models():
            model = client.get_model(summary.name)
            print(f"{summary.name}: {summary.architecture}, {summary.num_parameters:,} parameters")
            print(f"  decode mode {DecodeMode(summary.decode_mode).name}, {summary.digest}")
            print(f"  KV cache {model.plan.kv_bytes_per_token:,} bytes per token")
            for use in model.tensor_types:
                print(f"  {use.type}: {use.num_tensors} tensors, {use.size_bytes:,} bytes")
            for token in model.end_of_generation:
                print(f"  ends at {token.text} ({token.id}): {', '.join(token.sources)}")


if __name__ == "__main__":
    main()
