"""Many streams at once over the gRPC example, some of whose clients vanish: nothing is lost, doubled or left behind."""

import asyncio
import random
import resource

import grpc
import pytest
from gated_echo import gated_echo
from grpc_harness import Code, request, rpc, serving, text_of

from benchmarks.frontend_grpc import over_grpc

NUM_TOKENS = 60


async def one(stub, drops, number):
    """A whole answer, or some of one. Returns whether it was read to its end."""
    text = f"{number:04}"
    call = stub.Generate(request(text, max_tokens=NUM_TOKENS))
    responses = []
    async for response in call:
        responses.append(response)
        if drops and len(responses) == 1 + number % 20:
            call.cancel()
            break
    if call.cancelled():
        return False
    assert await call.code() is Code.OK
    assert text_of(responses) == text * (NUM_TOKENS // 4)
    assert [r.WhichOneof("event") for r in responses].count("completion") == 1
    return True


async def round_of(address, streams, chance):
    """Runs so many streams on four connections, one of which is closed over what it still has."""
    local = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, local) for _ in range(4)]
    stubs = [rpc.GenerationStub(channel) for channel in channels]
    doomed = [stubs[0].Generate(request("doomed", max_tokens=4000)) for _ in range(streams // 16)]
    await asyncio.gather(*(call.read() for call in doomed))
    tasks = [one(stubs[i % 3 + 1], chance.random() < 0.2, i) for i in range(streams)]
    finished = await asyncio.gather(*tasks)
    for channel in channels:
        await channel.close()
    return sum(finished)


def check_rounds(it, streams, rounds, caplog):
    chance = random.Random(7)
    for _ in range(rounds):
        finished = it.run(round_of(it.address, streams, chance))
        assert streams * 0.6 < finished < streams
        it.settled(running=0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_dropped_clients_leave_nothing_behind(caplog):
    with serving(step_s=0.002) as it:
        check_rounds(it, streams=96, rounds=1, caplog=caplog)


@pytest.mark.full
def test_memory_stays_flat_under_load(caplog):
    with serving(step_s=0.002) as it:
        check_rounds(it, streams=256, rounds=5, caplog=caplog)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        check_rounds(it, streams=256, rounds=30, caplog=caplog)
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 32 << 10


def test_the_load_benchmarks_front_end_reads_and_drops_streams():
    async def main():
        async with over_grpc(gated_echo, {"step_s": 0.001}) as (client, _, num_running):
            texts = []
            await client.generate(9, lambda text: texts.append(text) is None)
            await client.generate(4000, lambda text: False)
            return "".join(texts), await num_running()

    assert asyncio.run(main()) == ("\x01" * 9, 0)
