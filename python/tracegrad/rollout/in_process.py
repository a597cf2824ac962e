"""Run `vllm.LLM` in this process behind the interface of HTTP servers.

Request and response bodies are handled by vLLM's own serving classes. `vllm.LLM` is synchronous and must not be used by
two threads, so one thread drives it. vLLM is imported on use. Written against vLLM 0.32.
"""

import asyncio
import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from tracegrad.errors import ArgumentError, ServerError
from tracegrad.rollout.client import Answer, Servers

T = TypeVar("T")
SERVER_ARGUMENTS = ("enable_auto_tool_choice", "tool_call_parser")
"""Arguments of vLLM's server that its engine does not have; all others are passed to `vllm.LLM`."""
STOP_S = 30.0


class Engine:
    """One `vllm.LLM` and the only thread that uses it.

    Args:
        model: folder or name of the model.
        arguments: arguments of vLLM's EngineArgs by name, and those of `SERVER_ARGUMENTS`.

    Raises:
        ArgumentError: if vLLM is not installed here, or does not accept the arguments.
    """

    def __init__(self, model: str | Path, arguments: Mapping[str, Any]) -> None:
        try:
            from vllm import LLM
        except ImportError as error:
            raise ArgumentError(
                "TG-ROLLOUT-016: vLLM is not installed in this interpreter, where servers='in-process' runs it. "
                "Install vllm, or replace servers='in-process' by python=, the interpreter of an environment with vLLM."
            ) from error
        self.arguments = dict(arguments)
        engine_arguments = {name: value for name, value in arguments.items() if name not in SERVER_ARGUMENTS}
        try:
            self.llm: Any = LLM(model=str(model), **engine_arguments)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"TG-ROLLOUT-017: vllm.LLM does not accept its arguments: {str(error)[:500]}. Check the options in "
                f"engine=."
            ) from error
        self.error: BaseException | None = None
        self.paused = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[str, Callable[[Any], None]] = {}
        self._thread = threading.Thread(target=self._run, name="tracegrad-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and the engine; may be called again."""
        self._work.put(None)
        self._thread.join(STOP_S)
        with suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()

    def do(self, work: Callable[[Any], T]) -> Future[T]:
        """Run `work(llm)` between two engine steps and return its future."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(self.llm))
            except BaseException as error:
                future.set_exception(error)

        if self.error is not None:
            future.set_exception(self.dead_error)
        else:
            self._work.put(run)
        return future

    def pause(self, clear: bool) -> Future[None]:
        """Stop sampling; requests in flight are kept, and recomputed if caches are cleared."""

        def pause(llm: Any) -> None:
            llm.sleep(level=0, mode="keep")
            self.paused = True
            if clear:
                if not llm.reset_prefix_cache(reset_running_requests=True):
                    raise ServerError(
                        "TG-ROLLOUT-018: vLLM did not reset its prefix cache, which has keys and values of old weights."
                    )
                llm.reset_mm_cache()
                llm.llm_engine.reset_encoder_cache()

        return self.do(pause)

    def resume(self) -> Future[None]:
        """Continue sampling."""

        def resume(llm: Any) -> None:
            llm.wake_up(tags=["scheduling"])
            self.paused = False

        return self.do(resume)

    # Attributes that vLLM's serving classes read from an engine, with vLLM's names.

    @property
    def model_config(self) -> Any:
        """Model config that vLLM built from the arguments."""
        return self.llm.llm_engine.model_config

    @property
    def vllm_config(self) -> Any:
        """All of vLLM's configs together."""
        return self.llm.llm_engine.vllm_config

    @property
    def renderer(self) -> Any:
        """Renders messages to ids."""
        return self.llm.llm_engine.renderer

    @property
    def input_processor(self) -> Any:
        """Builds requests from ids."""
        return self.llm.llm_engine.input_processor

    @property
    def errored(self) -> bool:
        """Whether the engine has failed permanently."""
        return self.error is not None

    @property
    def dead_error(self) -> ServerError:
        """Error with the cause of the failure."""
        return ServerError(
            f"TG-ROLLOUT-019: vLLM in this process has ended: {type(self.error).__name__}: {self.error}. Read its "
            "output and resume the run."
        )

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Accept every request; vLLM queues it."""

    async def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter."""
        return await asyncio.wrap_future(self.do(lambda llm: llm.llm_engine.add_lora(lora_request)))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None, **_: Any
    ) -> AsyncIterator[Any]:
        """Yield the complete answer to one request, once; a request whose caller is gone is aborted."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def set_answer(output: Any) -> None:
            with suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(_settle, answer, output)

        def add(llm: Any) -> str:
            engine_id = llm.llm_engine.add_request(request_id, prompt, sampling_params, lora_request=lora_request)
            self._answers[request_id] = set_answer
            return engine_id

        engine_id = await asyncio.wrap_future(self.do(add))
        try:
            yield await answer
        finally:
            if not answer.done() or answer.cancelled():
                self.do(lambda llm: self._abort(llm, request_id, engine_id))

    def _abort(self, llm: Any, request_id: str, engine_id: str) -> None:
        if self._answers.pop(request_id, None) is not None:
            llm.llm_engine.abort_request([engine_id], internal=True)

    def _run(self) -> None:
        engine = self.llm.llm_engine
        try:
            while True:
                busy = bool(self._answers) and not self.paused
                try:
                    work = self._work.get(block=not busy)
                except queue.Empty:
                    for output in engine.step():
                        if output.finished and (set_answer := self._answers.pop(output.request_id, None)) is not None:
                            set_answer(output)
                    continue
                if work is None:
                    return
                work()
        except BaseException as error:
            self.error = error
            for set_answer in self._answers.values():
                set_answer(self.dead_error)
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


PLACEHOLDER_URL = "http://localhost:0"
"""Placeholder URL of the engine; it accepts no connections."""
BAD_REQUEST = 400


class InProcessServers(Servers):
    """An engine of this process as the only server of a run.

    Args:
        engine: engine with the policy.
        model: model name in requests.
        limits: timeout_s, retries and max_consecutive_failures, as for `Servers`.
    """

    def __init__(self, engine: Engine, *, model: str, **limits: Any) -> None:
        super().__init__([PLACEHOLDER_URL], model=model, **limits)
        self.engine = engine

    async def __aenter__(self) -> "InProcessServers":
        self._wire = EngineTransport(self.engine, self.model)
        return self

    async def url_of(self, session: str) -> str:
        """Raise an error: agents with their own client need an address, which an engine does not have."""
        raise ServerError(
            "TG-ROLLOUT-020: the policy is served in this process and has no address, so policy.base_url is not "
            "available. Use policy.chat, or remove servers='in-process'."
        )

    async def sleep(self, level: int = 1) -> None:
        """Free device memory between rollouts: level 1 keeps the weights in host memory.

        Raises:
            ArgumentError: without CUDA, since vLLM would report success but keep all of the memory.
        """
        await self._on_cuda("sleep", lambda llm: llm.sleep(level=level))

    async def wake(self) -> None:
        """Allocate the device memory again."""
        await self._on_cuda("wake_up", lambda llm: llm.wake_up())

    async def _on_cuda(self, name: str, work: Callable[[Any], Any]) -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            raise ArgumentError(
                f"TG-ROLLOUT-021: {name} has no effect with vLLM on {current_platform.device_type}: the memory is not "
                "freed, although vLLM reports that it is. Remove the call; it works only on CUDA."
            )
        await asyncio.wrap_future(self.engine.do(work))


class EngineTransport:
    """Answers requests from an engine instead of a connection.

    Args:
        engine: engine that answers.
        model: name of the base model of any adapters.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self.engine = engine
        self.serving = _Serving(engine, model)
        do = engine.do
        self._handlers: dict[str, Callable[[dict[str, Any], dict[str, str]], Awaitable[Any] | Any]] = {
            "/v1/chat/completions": lambda body, _: self.serving.chat(body),
            "/v1/completions": lambda body, _: self.serving.complete(body),
            "/inference/v1/generate": lambda body, _: self.serving.generate(body),
            "/v1/chat/completions/derender": lambda body, _: self.serving.derender(body),
            "/v1/models": lambda body, _: self.serving.list_models(),
            "/v1/load_lora_adapter": lambda body, _: self.serving.load(body),
            "/v1/unload_lora_adapter": lambda body, _: self.serving.unload(body),
            "/health": lambda body, _: do(lambda llm: None),
            "/is_paused": lambda body, _: {"is_paused": engine.paused},
            "/pause": _pause(engine),
            "/resume": lambda body, _: engine.resume(),
            "/init_weight_transfer_engine": lambda body, _: do(lambda llm: llm.init_weight_transfer_engine(body)),
            "/start_weight_update": lambda body, _: do(lambda llm: llm.start_weight_update()),
            "/update_weights": lambda body, _: do(lambda llm: llm.update_weights(body)),
            "/finish_weight_update": lambda body, _: do(lambda llm: llm.finish_weight_update(**body)),
            "/weight_info": lambda body, _: do(lambda llm: {"weight_version": llm.get_weight_version()}),
            "/reset_prefix_cache": lambda body, _: do(lambda llm: {"success": llm.reset_prefix_cache()}),
            "/collective_rpc": lambda body, _: do(lambda llm: {"results": llm.collective_rpc(**body)}),
        }

    async def close(self) -> None:
        """Do nothing: there are no connections, and the creator of the engine closes it."""

    async def request(
        self, method: str, url: str, path: str, data: bytes | None, *, timeout_s: float, **_: Any
    ) -> Answer:
        """Answer a request in time, or return why there is no answer, as `client.Transport.request`.

        Raises only on cancellation.
        """
        started = time.monotonic()
        parts = urlsplit(path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        handler = self._handlers.get(parts.path)
        if handler is None:
            return Answer(url, 404, {"error": f"{parts.path} is not served in this process"}, 0.0)
        try:
            result = await asyncio.wait_for(_result(handler(json.loads(data) if data else {}, query)), timeout_s)
        except asyncio.TimeoutError:
            seconds = time.monotonic() - started
            return Answer(url, 0, None, seconds, f"no answer within {seconds:.1f} s", silent=True)
        except Exception as error:  # vLLM may raise any exception
            status = BAD_REQUEST if isinstance(error, (ValueError, TypeError, ArgumentError)) else 500
            words = f"{type(error).__name__}: {error}"
            return Answer(url, status, {"error": words}, time.monotonic() - started)
        status, body = result if isinstance(result, tuple) else (200, result)
        return Answer(url, status, body, time.monotonic() - started)


class _Serving:
    """vLLM's own serving classes over the engine, so that answers equal those of its server."""

    def __init__(self, engine: Engine, model: str) -> None:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.entrypoints.scale_out.derender.serving import ServingDerender
        from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
        from vllm.renderers.online_derenderer import OnlineDerenderer
        from vllm.renderers.online_renderer import OnlineRenderer

        vllm_engine: Any = engine
        common: dict[str, Any] = {"request_logger": None}
        chat: dict[str, Any] = {
            "chat_template": None,
            "chat_template_content_format": "auto",
            "enable_auto_tools": bool(engine.arguments.get("enable_auto_tool_choice")),
            "tool_parser": engine.arguments.get("tool_call_parser"),
            "reasoning_parser": engine.vllm_config.structured_outputs_config.reasoning_parser,
        }
        name = str(engine.model_config.model)
        self.models = OpenAIServingModels(vllm_engine, [BaseModelPath(name=model, model_path=name)])
        renderer = OnlineRenderer(engine.model_config, engine.renderer, **common, **chat)
        parser = OnlineDerenderer(engine.model_config, engine.renderer, **common, **chat)
        chat["reasoning_parser"] = chat["reasoning_parser"] or ""
        self._chat = OpenAIServingChat(
            vllm_engine, self.models, "assistant", online_renderer=renderer, **common, **chat
        )
        self._complete = OpenAIServingCompletion(vllm_engine, self.models, online_renderer=renderer, **common)
        self._generate = ServingTokens(vllm_engine, self.models, renderer, **common)
        self._derender = ServingDerender(self.models, parser, **common)

    async def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return _body(await self._chat.create_chat_completion(ChatCompletionRequest(**body)))

    async def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        return _body(await self._complete.create_completion(CompletionRequest(**body)))

    async def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

        return _body(await self._generate.serve_tokens(GenerateRequest(**body)))

    async def derender(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import DerenderChatRequest

        return _body(await self._derender.derender_chat_response(DerenderChatRequest(**body)))

    async def list_models(self) -> tuple[int, Any]:
        return _body(await self.models.show_available_models())

    async def load(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        return _body(await self.models.load_lora_adapter(LoadLoRAAdapterRequest(**body)))

    async def unload(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        return _body(await self.models.unload_lora_adapter(UnloadLoRAAdapterRequest(**body)))


def _pause(engine: Engine) -> Callable[[dict[str, Any], dict[str, str]], Any]:
    def pause(_: dict[str, Any], query: dict[str, str]) -> Any:
        if query.get("mode") != "keep":
            raise ArgumentError(
                f"TG-ROLLOUT-022: mode is {query.get('mode')!r}, which drops requests in flight. Pause with mode=keep."
            )
        return engine.pause(query.get("clear_cache", "true") != "false")

    return pause


async def _result(value: Any) -> Any:
    if isinstance(value, (dict, tuple)):
        return value
    return await (value if asyncio.iscoroutine(value) else asyncio.wrap_future(value))


def _body(response: Any) -> tuple[int, Any]:
    """Return status and JSON of a serving class's response; an error has its own status."""
    if isinstance(response, str):
        return 200, {"message": response}
    error = getattr(response, "error", None)
    return (int(error.code) if error is not None else 200), response.model_dump(mode="json")
