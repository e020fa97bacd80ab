"""AsyncLLM over a fake token core in a real child process: streams, aborts, faults, and what stays behind."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from echo_core import MAX_MODEL_LEN, echo

from jaxserve import AsyncLLM, EngineDeadError, ParameterError, QueueFullError, RequestError
from jaxserve.input_processor import InputProcessor
from jaxserve.mailbox import Mailbox, merge_deltas
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams

AT_ONCE_S = 2.0  # far below any step or timeout here, far above a busy machine's hiccups


@pytest.fixture(scope="module")
def shared():
    """One engine for the tests that leave it as it was."""
    llm = AsyncLLM.over(echo, {"step_s": 0.001})
    yield llm
    llm.shutdown()


@pytest.fixture
def start():
    """Starts engines that a test may break."""
    started = []

    def start(**config):
        started.append(AsyncLLM.over(echo, {"step_s": 0.001, **config}))
        return started[-1]

    yield start
    for llm in started:
        llm.shutdown()


def params(max_tokens=8, kind=RequestOutputKind.CUMULATIVE, **options):
    return SamplingParams(max_tokens=max_tokens, output_kind=kind, **options)


async def collect(llm, prompt, sampling_params, request_id="r"):
    return [output async for output in llm.generate(prompt, sampling_params, request_id)]


async def last(llm, prompt, sampling_params, request_id="r"):
    return (await collect(llm, prompt, sampling_params, request_id))[-1].outputs[0]


async def settled(llm, **expected):
    """Waits until the child's counters are as expected."""
    for _ in range(200):
        metrics = await llm.get_metrics()
        if all(metrics[name] == value for name, value in expected.items()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"expected {expected}, got {metrics}")


# ------------------------------------------------------------------------------------------------------------ streams


def test_a_loop_that_was_held_up_gets_all_that_came_meanwhile_as_one_output(shared):
    async def main():
        async with contextlib.aclosing(shared.generate("abc", params(300, RequestOutputKind.DELTA), "r")) as outputs:
            await anext(outputs)
            time.sleep(0.2)  # holds up the loop, not the engine
            return (await anext(outputs)).outputs[0].token_ids

    token_ids = asyncio.run(main())
    assert len(token_ids) > 2
    assert token_ids == list((b"abc" * 100)[1 : 1 + len(token_ids)])


def test_a_request_arrives_when_it_is_made_and_not_when_its_grammar_is_checked(shared, monkeypatch):
    checked = []
    monkeypatch.setattr("jaxserve.async_engine.check_grammar", lambda form: checked.append(time.monotonic()))
    monkeypatch.setattr(InputProcessor, "_check_form", lambda *_: None)  # this tokenizer holds no text to a form
    constrained = params(1, structured_outputs={"regex": "a"})
    (output,) = asyncio.run(collect(shared, "abc", constrained))
    assert output.metrics.arrival_time < checked[0]


def test_the_three_output_kinds_tell_the_same_text(shared):
    async def main():
        kinds = RequestOutputKind
        cumulative = await collect(shared, "abc", params(7))
        deltas = await collect(shared, "abc", params(7, kinds.DELTA))
        final = await collect(shared, "abc", params(7, kinds.FINAL_ONLY))
        assert cumulative[-1].outputs[0].text == "abcabca"
        assert all(cumulative[-1].outputs[0].text.startswith(output.outputs[0].text) for output in cumulative)
        assert "".join(output.outputs[0].text for output in deltas) == "abcabca"
        assert [output.outputs[0].text for output in final] == ["abcabca"]
        assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
        assert final[0].outputs[0].finish_reason == "length"
        assert (final[0].request_id, final[0].prompt, final[0].prompt_token_ids) == ("r", "abc", [97, 98, 99])

    asyncio.run(main())


def test_many_requests_run_together_and_keep_apart(shared):
    async def main():
        before = (await shared.get_metrics())["steps"]
        prompts = [f"prompt {i}" for i in range(50)]
        samples = await asyncio.gather(*(last(shared, p, params(40), request_id=p) for p in prompts))
        assert [s.text for s in samples] == [(p * 5)[:40] for p in prompts]
        assert (await shared.get_metrics())["steps"] - before < 5 * 40  # one by one it would be 50 * 40

    asyncio.run(main())


def test_samples_of_one_request_come_by_index(shared):
    async def main():
        outputs = await collect(shared, "ab", params(4, RequestOutputKind.FINAL_ONLY, n=3))
        assert [(s.index, s.text) for s in outputs[-1].outputs] == [(0, "abab"), (1, "abab"), (2, "abab")]

    asyncio.run(main())


def test_large_messages_cross_whole_under_uvloop_too(start):
    uvloop = pytest.importorskip("uvloop")
    llm = start()

    async def many() -> list[list[int]]:
        prompts = [[65 + i % 26] * 500 for i in range(400)]  # one message to the child, of 1.2 MB with its parameters
        found = await asyncio.gather(*(last(llm, prompt, params(2), str(i)) for i, prompt in enumerate(prompts)))
        return [sample.token_ids for sample in found]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(many()) == [[65 + i % 26] * 2 for i in range(400)]


def test_token_ids_are_a_prompt_too(shared):
    assert asyncio.run(last(shared, [104, 105], params(2))).text == "hi"


def test_no_sampling_params_means_the_models_defaults(shared):
    assert len(asyncio.run(last(shared, "a", None)).token_ids) == 16


def test_a_stop_string_ends_the_request_here_and_in_the_child(start):
    async def main():
        llm = start()
        sample = await last(llm, "abcdef", params(1000, stop="de"))
        assert (sample.text, sample.finish_reason, sample.stop_reason) == ("abc", "stop", "de")
        await settled(llm, running=0, stopped=1, finished=0)

    asyncio.run(main())


def test_a_deadline_reaches_the_core_as_a_time(shared, monkeypatch):
    async def main():
        submit, seen = shared._submit, []
        monkeypatch.setattr(shared, "_submit", lambda *args: (seen.extend(args[2]), submit(*args))[1])
        async for _ in shared.generate("a", params(1), "r", deadline=5.0, priority=3, cache_salt="s"):
            pass
        assert 4.0 < seen[0].deadline - time.monotonic() <= 5.0
        assert (seen[0].priority, seen[0].cache_salt) == (3, "s")

    asyncio.run(main())


def test_what_is_said_in_one_turn_of_the_loop_goes_in_one_message(shared, monkeypatch):
    async def main():
        await shared.get_metrics()
        send, messages = shared._process.send, []
        monkeypatch.setattr(shared._process, "send", lambda message: (messages.append(message), send(message)))
        await asyncio.gather(*(last(shared, "a", params(1), request_id=str(i)) for i in range(20)))
        assert [len(message.groups) for message in messages] == [20]

    asyncio.run(main())


def test_one_engine_serves_one_loop_after_another(shared):
    for _ in range(3):
        assert asyncio.run(last(shared, "xy", params(3))).text == "xyx"


def test_requests_of_a_loop_that_was_closed_over_them_are_aborted(start):
    llm = start()
    loop = asyncio.new_event_loop()
    generator = llm.generate("a", params(4000), "r")
    loop.run_until_complete(anext(generator))
    loop.close()
    asyncio.run(settled(llm, running=0, aborted=1))
    with contextlib.suppress(StopIteration):
        generator.aclose().send(None)


def test_a_second_loop_at_the_same_time_is_refused(start):
    llm = start()

    async def main():
        async for _ in llm.generate("a", params(4000), "r"):
            with pytest.raises(RuntimeError, match="one event loop at a time"):
                await asyncio.to_thread(asyncio.run, collect(llm, "b", params(), "s"))
            break

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------- slow readers


def test_unread_deltas_merge_and_lose_nothing(shared):
    async def main():
        stream = shared.generate("abc", params(300, RequestOutputKind.DELTA), "r")
        texts = [(await anext(stream)).outputs[0].text]
        await asyncio.sleep(1.0)
        texts += [output.outputs[0].text async for output in stream]
        assert "".join(texts) == "abc" * 100
        assert len(texts) < 20  # 300 without merging
        assert max(map(len, texts)) > 100

    asyncio.run(main())


def test_of_unread_cumulative_outputs_the_newest_stays(shared):
    async def main():
        stream = shared.generate("abc", params(300), "r")
        await anext(stream)
        await asyncio.sleep(1.0)
        rest = [output async for output in stream]
        assert len(rest) < 20
        assert rest[-1].outputs[0].text == "abc" * 100

    asyncio.run(main())


def delta(index, text, *, finished=False, logprobs=None):
    sample = CompletionOutput(
        index=index,
        text=text,
        token_ids=list(text.encode()),
        finish_reason="stop" if finished else None,
        logprobs=logprobs,
    )
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=[], outputs=[sample], finished=finished)


def test_deltas_merge_sample_by_sample():
    first = merge_deltas(delta(1, "x", logprobs=[{}]), delta(0, "a"))
    merged = merge_deltas(first, delta(1, "yz", finished=True, logprobs=[{}, {}]))
    assert [(s.index, s.text, s.token_ids) for s in merged.outputs] == [(0, "a", [97]), (1, "xyz", [120, 121, 122])]
    assert (merged.outputs[0].finish_reason, merged.outputs[1].finish_reason) == (None, "stop")
    assert merged.outputs[1].logprobs == [{}, {}, {}]
    assert merged.finished


def test_an_error_comes_before_a_part_but_not_before_the_end():
    async def main():
        part, end = Mailbox(RequestOutputKind.DELTA), Mailbox(RequestOutputKind.DELTA)
        part.put(delta(0, "a"))
        end.put(delta(0, "a", finished=True))
        for mailbox in (part, end):
            mailbox.fail(EngineDeadError("gone"))
        assert (await end.take()).finished
        with pytest.raises(EngineDeadError, match="gone"):
            await part.take()

    asyncio.run(main())


# -------------------------------------------------------------------------------------------------------------- abort


def test_closing_the_generator_aborts(start):
    async def main():
        llm = start()
        stream = llm.generate("a", params(4000), "r")
        await anext(stream)
        await stream.aclose()
        await settled(llm, running=0, aborted=1)
        assert (await last(llm, "b", params(2))).text == "bb"  # the id is free again

    asyncio.run(main())


def test_cancelling_the_task_aborts(start):
    async def main():
        llm = start()
        task = asyncio.create_task(collect(llm, "a", params(4000)))
        await settled(llm, running=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(llm, running=0, aborted=1)

    asyncio.run(main())


def test_abort_ends_the_stream_with_what_there_is(start):
    async def main():
        llm = start()
        outputs = []
        async for output in llm.generate("ab", params(4000), "r"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("r")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert outputs[-1].outputs[0].text.startswith(outputs[-2].outputs[0].text)
        assert len(outputs) <= 5
        await settled(llm, running=0, aborted=1)

    asyncio.run(main())


def test_abort_of_all_samples_of_a_request(start):
    async def main():
        llm = start()
        async for output in llm.generate("ab", params(4000, n=3), "r"):
            if not output.finished:
                await llm.abort("r")
        assert [sample.finish_reason for sample in output.outputs] == ["abort"] * 3
        await settled(llm, running=0, aborted=3)

    asyncio.run(main())


def test_abort_of_an_unknown_id_does_nothing(shared):
    async def main():
        aborted = (await shared.get_metrics())["aborted"]
        await shared.abort("nobody")
        assert (await shared.get_metrics())["aborted"] == aborted

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, RequestError, "prompt is empty"),
        ("x" * MAX_MODEL_LEN, {}, RequestError, f"prompt has {MAX_MODEL_LEN} tokens, but max_model_len is"),
        ([5, 128], {}, ParameterError, "128"),
        ("a", {"logprobs": 21}, ParameterError, r"logprobs must be at most max_logprobs \(20\), got 21"),
        ("a", {"stop_token_ids": [500]}, ParameterError, "stop_token_ids"),
        ("a", {"extra_args": {"key": object()}}, RequestError, "a value that cannot reach the engine"),
        ("refuse", {}, RequestError, "refused, as planted"),
        ("full", {}, QueueFullError, "the queue is full, as planted"),
        (7, {}, TypeError, "a prompt must be"),
    ],
)
def test_a_bad_request_raises_in_its_caller_only(shared, prompt, options, error, message):
    async def main():
        good = asyncio.create_task(last(shared, "good", params(50), "good"))
        await asyncio.sleep(0.01)
        with pytest.raises(error, match=message):
            await collect(shared, prompt, params(**options), "bad")
        assert (await good).text == ("good" * 13)[:50]
        assert (await last(shared, "again", params(5), "bad")).text == "again"

    asyncio.run(main())


def test_arguments_of_the_wrong_type_raise_in_their_caller_only(shared):
    async def main():
        for options in ({"priority": "high"}, {"cache_salt": 7}):
            with pytest.raises((RequestError, ParameterError), match=r"a value of the wrong type|must be"):
                await anext(shared.generate("a", params(), "bad", **options))
        with pytest.raises(TypeError, match="request_id must be a str, got int"):
            await anext(shared.generate("a", params(), 7))
        assert (await last(shared, "good", params(4))).text == "good"

    asyncio.run(main())


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("request_id", "options"),
    [
        ("\ud800", {}),
        ("bad", {"stop": ["\ud800"]}),
        ("bad", {"extra_args": {"\ud800": 1}}),
        ("bad", {"extra_args": {"a": ["\ud800"]}}),
        ("bad", {"extra_args": nested(100_000)}),
        ("bad", {"cache_salt": "\ud800"}),
    ],
)
def test_what_cannot_be_packed_costs_its_caller_only(shared, request_id, options):
    async def main():
        salt = {"cache_salt": options["cache_salt"]} if "cache_salt" in options else {}
        sampling = params(**{name: value for name, value in options.items() if name != "cache_salt"})
        neighbour = asyncio.create_task(last(shared, "abc", params(50)))
        with pytest.raises(RequestError):
            async for _ in shared.generate("a", sampling, request_id, **salt):
                pass
        assert len((await neighbour).token_ids) == 50

    asyncio.run(main())


def test_when_one_sample_is_refused_none_runs(start):
    async def main():
        llm = start()
        with pytest.raises(RequestError, match="refused"):
            await collect(llm, "refuse the second", params(4000, n=2))
        await settled(llm, running=0, aborted=1)

    asyncio.run(main())


def test_a_request_id_in_use_is_refused_and_its_owner_unharmed(shared):
    async def main():
        stream = shared.generate("abc", params(50), "r")
        await anext(stream)
        with pytest.raises(RequestError, match="'r' is in use"):
            await collect(shared, "x", params())
        rest = [output async for output in stream]
        assert rest[-1].outputs[0].text == ("abc" * 17)[:50]

    asyncio.run(main())


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match=r"unknown engine options \['page_sise'\]"):
        AsyncLLM("smollm2-135m", page_sise=16)


# ------------------------------------------------------------------------------------------------- the engine's death


def test_a_killed_engine_wakes_all_waiters_at_once_and_later_calls_fail_fast(start):
    async def main():
        llm = start(step_s=0.05)
        tasks = [asyncio.create_task(collect(llm, "a", params(4000), str(i))) for i in range(10)]
        await settled(llm, running=10)
        tasks.append(asyncio.create_task(llm.get_metrics()))
        os.kill(llm._process.pid, signal.SIGKILL)
        start_s = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert "killed by SIGKILL" in str(results[0])
        for call in (collect(llm, "a", params()), llm.check_health(), llm.get_metrics(), llm.reset_prefix_cache()):
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                await call
        await llm.abort("0")  # nothing to abort: still no error
        assert time.monotonic() - start_s < AT_ONCE_S
        assert llm.errored
        assert not llm.is_running

    asyncio.run(main())


def test_an_engine_that_was_killed_while_idle_is_noticed_by_the_next_call(start):
    llm = start()
    os.kill(llm._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, llm._process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(EngineDeadError):
        asyncio.run(collect(llm, "a", params()))
    assert llm.errored


def test_an_exception_in_the_step_loop_reaches_every_caller(start):
    async def main():
        llm = start()
        good = asyncio.create_task(collect(llm, "a", params(4000), "good"))
        await settled(llm, running=1)
        for task in (collect(llm, "crash", params(), "bad"), good):
            with pytest.raises(EngineDeadError, match="RuntimeError: planted fault"):
                await task
        assert llm.errored

    asyncio.run(main())


def test_a_start_that_fails_says_why_and_leaves_no_process(start):
    before = set(multiprocessing.active_children())
    with pytest.raises(EngineDeadError, match="could not start: ValueError: no such weights, as planted"):
        start(fail=True)
    assert set(multiprocessing.active_children()) <= before


def test_a_script_without_a_guard_is_told_of_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from echo_core import echo\nfrom jaxserve import AsyncLLM\nAsyncLLM.over(echo, {})\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, script], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "a script must guard its calls by `if __name__" in done.stderr


def test_a_program_that_forgets_shutdown_still_ends(tmp_path):
    script = """
import asyncio
from echo_core import echo
from jaxserve import AsyncLLM, SamplingParams
async def main():
    llm = AsyncLLM.over(echo, {})
    await anext(llm.generate("a", SamplingParams(max_tokens=4000), "r"))
    print(llm._process.pid)
if __name__ == "__main__":
    asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert _ends(int(done.stdout))


def test_shutdown_wakes_waiters_and_leaves_no_process(start):
    async def main():
        llm = start()
        task = asyncio.create_task(collect(llm, "a", params(4000)))
        await settled(llm, running=1)
        pid = llm._process.pid
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # reaped: no zombie
        assert not llm.is_running
        llm.shutdown()  # twice is fine

    asyncio.run(main())


def test_shutdown_between_a_request_and_its_sending(start):
    async def main():
        llm = start()
        task = asyncio.create_task(collect(llm, "a", params()))
        asyncio.get_running_loop().call_soon(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await task

    asyncio.run(main())


def test_a_process_that_does_not_end_by_itself_is_ended_by_force(start):
    llm = start()
    os.kill(llm._process.pid, signal.SIGSTOP)
    start_s = time.monotonic()
    llm.shutdown(timeout=0.2)
    assert time.monotonic() - start_s < AT_ONCE_S
    assert not llm.is_running


def test_the_engine_does_not_outlive_its_parent():
    script = """
import os, signal
from echo_core import echo
from jaxserve import AsyncLLM
if __name__ == "__main__":
    print(AsyncLLM.over(echo, {})._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert _ends(int(done.stdout))


def _ends(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_an_idle_engine_takes_no_time_of_the_processor(shared):
    def ticks():
        fields = Path(f"/proc/{shared._process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # user and system time, 10 ms each

    asyncio.run(shared.get_metrics())
    before = ticks()
    time.sleep(0.5)
    assert ticks() - before <= 2  # a busy loop takes 50


# ---------------------------------------------------------------------------------------------------- questions to it


def test_questions_are_answered_while_requests_run(shared):
    async def main():
        assert await shared.reset_prefix_cache() is True
        async for _ in shared.generate("a", params(4000), "r"):
            assert await shared.reset_prefix_cache() is False
            assert (await shared.get_metrics())["running"] == 1
            break
        await shared.check_health()
        assert shared.is_running
        assert not shared.errored
        tokenizer = await shared.get_tokenizer()
        assert tokenizer.encode("hi") == [104, 105]
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"

    asyncio.run(main())
