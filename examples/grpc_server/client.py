"""Streams an answer from the server: `python client.py "The capital of France is" --max-tokens 32`."""

import argparse

import generation_pb2 as pb
import generation_pb2_grpc as rpc
import grpc


def stream(channel: grpc.Channel, request: pb.GenerateRequest) -> pb.Completion | None:
    """Prints the first sample's text as it comes; returns its completion."""
    completion = None
    for response in rpc.GenerationStub(channel).Generate(request):
        if response.HasField("delta") and response.delta.index == 0:
            print(response.delta.text, end="", flush=True)
        elif response.HasField("completion") and response.completion.index == 0:
            completion = response.completion
    return completion


def main() -> None:
    parser = argparse.ArgumentParser(description="client of the jaxserve gRPC example")
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=None, help="0 always takes the likeliest token; unset: 1")
    parser.add_argument("--timeout-s", type=float, default=None, help="the request's deadline")
    options = parser.parse_args()
    params = pb.SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
    request = pb.GenerateRequest(text=options.prompt, sampling_params=params)
    with grpc.insecure_channel(options.address) as channel:
        grpc.channel_ready_future(channel).result(timeout=10)
        completion = stream(channel, request)
    if completion is not None:
        print(f"\n[{completion.finish_reason}, {len(completion.token_ids)} tokens]")


if __name__ == "__main__":
    main()
