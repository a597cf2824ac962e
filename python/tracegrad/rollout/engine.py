"""`vllm.LLM` in this process, driven by a thread of its own, as vLLM's serving classes ask an engine for tokens.

`vllm.LLM` is synchronous and not to be used by two threads: whatever it does is done here, between two of its steps.
vLLM is imported on use. Called by `inside`; written against vLLM 0.32.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tracegrad.errors import ArgumentError, ServerError

T = TypeVar("T")
OF_SERVING = ("enable_auto_tool_choice", "tool_call_parser")
"""Arguments of vLLM's server that are none of its engine's; the rest goes to `vllm.LLM` as it is."""
STOP_S = 30.0


class Engine:
    """One `vllm.LLM` and the thread that alone uses it.

    Args:
        model: folder or name of the model.
        arguments: of vLLM's EngineArgs by name, and those of `OF_SERVING`.

    Raises:
        ArgumentError: if vLLM is not installed here, or does not take the arguments.
    """

    def __init__(self, model: str | Path, arguments: Mapping[str, Any]) -> None:
        try:
            from vllm import LLM
        except ImportError as error:
            raise ArgumentError(
                "vLLM is not installed in this interpreter, and servers='in-process' runs it here. Nothing could be "
                "played. Install vllm here, or pass python=, the interpreter of an environment that has it."
            ) from error
        self.arguments = dict(arguments)
        told = {name: value for name, value in arguments.items() if name not in OF_SERVING}
        try:
            self.llm: Any = LLM(model=str(model), **told)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"vllm.LLM does not take its arguments: {str(error)[:500]}. Nothing could be played. Look at engine=."
            ) from error
        self.error: BaseException | None = None
        self.paused = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[str, Callable[[Any], None]] = {}
        self._thread = threading.Thread(target=self._run, name="tracegrad-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and the engine; may be called again."""
        self._work.put(None)
        self._thread.join(STOP_S)
        with suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()

    def do(self, work: Callable[[Any], T]) -> Future[T]:
        """What `work(llm)` gives, done between two steps."""
        found: Future[T] = Future()

        def done() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(work(self.llm))
            except BaseException as error:
                found.set_exception(error)

        if self.error is not None:
            found.set_exception(self.dead_error)
        else:
            self._work.put(done)
        return found

    def pause(self, clear: bool) -> Future[None]:
        """Stops sampling; what is under way is kept, and computed anew where caches are cleared."""

        def paused(llm: Any) -> None:
            llm.sleep(level=0, mode="keep")
            self.paused = True
            if clear:
                if not llm.reset_prefix_cache(reset_running_requests=True):
                    raise ServerError("vLLM did not reset its prefix cache. Old keys and values would be used.")
                llm.reset_mm_cache()
                llm.llm_engine.reset_encoder_cache()

        return self.do(paused)

    def resume(self) -> Future[None]:
        """Goes on sampling."""

        def resumed(llm: Any) -> None:
            llm.wake_up(tags=["scheduling"])
            self.paused = False

        return self.do(resumed)

    # What vLLM's serving classes ask of an engine, by their names.

    @property
    def model_config(self) -> Any:
        """As vLLM made it of the arguments."""
        return self.llm.llm_engine.model_config

    @property
    def vllm_config(self) -> Any:
        """All configs together."""
        return self.llm.llm_engine.vllm_config

    @property
    def renderer(self) -> Any:
        """Makes ids of messages."""
        return self.llm.llm_engine.renderer

    @property
    def input_processor(self) -> Any:
        """Makes requests of ids."""
        return self.llm.llm_engine.input_processor

    @property
    def errored(self) -> bool:
        """Whether the engine has failed for good."""
        return self.error is not None

    @property
    def dead_error(self) -> ServerError:
        """Why."""
        return ServerError(
            f"vLLM in this process has ended: {type(self.error).__name__}: {self.error}. It cannot be asked. Look at "
            "what it printed, and start the run again from its folder."
        )

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Everything is taken; vLLM queues it."""

    async def add_lora(self, lora_request: Any) -> bool:
        """Loads an adapter."""
        return await asyncio.wrap_future(self.do(lambda llm: llm.llm_engine.add_lora(lora_request)))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None, **_: Any
    ) -> AsyncIterator[Any]:
        """The whole answer to one request, once; a request that nobody waits for any more is let go."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def found(output: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, answer, output)

        def added(llm: Any) -> str:
            known = llm.llm_engine.add_request(request_id, prompt, sampling_params, lora_request=lora_request)
            self._answers[request_id] = found
            return known

        known = await asyncio.wrap_future(self.do(added))
        try:
            yield await answer
        finally:
            if not answer.done() or answer.cancelled():
                self.do(lambda llm: self._let_go(llm, request_id, known))

    def _let_go(self, llm: Any, request_id: str, known: str) -> None:
        if self._answers.pop(request_id, None) is not None:
            llm.llm_engine.abort_request([known], internal=True)

    def _run(self) -> None:
        engine = self.llm.llm_engine
        try:
            while True:
                busy = bool(self._answers) and not self.paused
                try:
                    work = self._work.get(block=not busy)
                except queue.Empty:
                    for output in engine.step():
                        if output.finished and (found := self._answers.pop(output.request_id, None)) is not None:
                            found(output)
                    continue
                if work is None:
                    return
                work()
        except BaseException as error:
            self.error = error
            for found in self._answers.values():
                found(self.dead_error)
            while not self._work.empty():
                if (work := self._work.get()) is not None:
                    work()


def _settle(answer: asyncio.Future[Any], output: Any) -> None:
    if answer.done():
        return
    if isinstance(output, BaseException):
        answer.set_exception(output)
    else:
        answer.set_result(output)
