"""A policy behind HTTP in the test process: the example's model, sampled token by token, answering as vLLM does.

It takes weights by the requests of `weight_sync.File`, and adapters by those of `weight_sync.Lora`. `mistake`
makes it sample from something else than it was told, in one of the ways in which a real server does.
"""

import asyncio
import contextlib
import copy
import json
import threading
from pathlib import Path

import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

import rollout

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
BLOCK = 16
AGAIN = "3"
PARTS = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume")


class Sequence:
    """Keys and values of the ids so far, by layer. A step costs less than a forward pass of transformers."""

    def __init__(self, model):
        self.length, self.layers = 0, [None] * len(model.model.layers)
        every = torch.arange(model.config.max_position_embeddings)[None]
        self.cos, self.sin = (each[0] for each in model.model.rotary_emb(model.lm_head.weight, every))

    def forward(self, model, ids):
        """Append ids and return the logits [V] after the last one."""
        here = slice(self.length, self.length + len(ids))
        places = torch.arange(here.stop)
        mask = places <= places[here, None] if len(ids) > 1 else None
        hidden = model.model.embed_tokens(torch.tensor(ids))
        for index, layer in enumerate(model.model.layers):
            own, normed = layer.self_attn, _normed(layer.input_layernorm, hidden)
            query, key, value = (
                part(normed).view(len(ids), -1, own.head_dim) for part in (own.q_proj, own.k_proj, own.v_proj)
            )
            query, key = _normed(own.q_norm, query).transpose(0, 1), _normed(own.k_norm, key).transpose(0, 1)
            query, key = apply_rotary_pos_emb(query, key, self.cos[here], self.sin[here], unsqueeze_dim=0)
            value = value.transpose(0, 1)
            if self.layers[index] is not None:
                key, value = (torch.cat(pair, 1) for pair in zip(self.layers[index], (key, value), strict=True))
            self.layers[index] = key, value
            key, value = (each.repeat_interleave(own.num_key_value_groups, 0) for each in (key, value))
            attended = F.scaled_dot_product_attention(query, key, value, mask).transpose(0, 1).flatten(1)
            hidden = hidden + own.o_proj(attended)
            hidden = hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden))
        self.length = here.stop
        return model.lm_head(_normed(model.model.norm, hidden[-1]))


def _normed(norm, hidden):
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


class PolicyServer:
    """One server; as a context manager it serves from a thread of its own.

    `mistake`: None, "deaf" (it keeps its weights), "head" (the tied head stays as it was), "hot" (it samples at 1.5 and
    says logprobs of that), "stale" (keys and values outlive the weights that they were made by), "before" (under a new
    name stands the adapter before), "bare" (no adapter does anything), "scaled" (adapters are added twice), "layer"
    (one layer keeps its weights), "restarted" (after the second push it has the weights that it began with), "half"
    (every other request is answered by weights that nobody pushes to), "cached" (an answer is given again for the same
    request), "bf16", "template", "tokenizer" (it has another), "deaf to AGAIN"
    (it does not see a last message AGAIN). Where `key` is set it asks for it. `sampling` is how it samples, whatever a
    request says: top_k, top_p, min_p and penalties. It follows a request's own penalties, and no other of these. Its
    logprobs are processed ones, after the temperature, or of temperature 1 where `raw` is set.
    """

    def __init__(self, mistake=None, fail=(), port=0, sampling=None):
        torch.manual_seed(0)
        self.port, self.half = port, False
        self.version, self.versions = "default", []
        self.going = asyncio.Event()
        self.going.set()
        self.mistake, self.fail = mistake, list(fail)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        if mistake == "bf16":
            self.model = self.model.bfloat16()
        self.first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.bare = copy.deepcopy(self.model)
        self.sampling, self.answered, self.sampled = sampling or {}, {}, 0
        self.cached = {}
        self.adapted, self.known = {"clerk": self.model}, []
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.generator = torch.Generator().manual_seed(1)
        self.calls = self.pushes = self.generated = 0
        self.scales_out = self.says_ends = True
        self.delay = 0.0
        self.key, self.raw = None, False

    async def _chat(self, request):
        body = await request.json()
        if body["model"] not in self.adapted:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        self.calls += 1
        number = self.calls
        if self.fail and self.calls in self.fail:
            return web.json_response({"error": {"message": "told to fail"}}, status=400)
        await asyncio.sleep(self.delay)
        await self.going.wait()
        same = json.dumps({name: value for name, value in body.items() if name != "cache_salt"}, sort_keys=True)
        if self.mistake == "cached" and same in self.answered:
            return web.json_response(self.answered[same])
        self.answered[same] = {**self._answer(body), "id": f"chat-{id(self)}-{number}"}
        return web.json_response(self.answered[same])

    @web.middleware
    async def _keyed(self, request, handler):
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return await handler(request)

    async def _generate(self, request):
        if (body := await request.json()) == {}:
            return web.json_response({}, status=400 if self.scales_out else 404)
        self.generated += 1
        params = body["sampling_params"]
        sampled, logprobs, reason = self._sampled(body["token_ids"], {**params, "model": body["model"]})
        content = [{"token_id": id, "logprob": logprob} for id, logprob in zip(sampled, logprobs, strict=True)]
        choice = {"index": 0, "token_ids": sampled, "logprobs": {"content": content}, "finish_reason": reason}
        return web.json_response({"request_id": "g", "choices": [{**choice, "stop_reason": None}]})

    async def _derender(self, request):
        if (body := await request.json()) == {}:
            return web.json_response({}, status=400)
        [choice] = body["generate_response"]["choices"]
        message = {"role": "assistant", "content": self.tokenizer.decode(choice["token_ids"])}
        return web.json_response({"object": "chat.completion", "choices": [{"index": 0, "message": message}]})

    async def _complete(self, request):
        body = await request.json()
        sampled, logprobs, reason = self._sampled(body["prompt"], body)
        choice = {"index": 0, "text": "", "token_ids": sampled, "prompt_token_ids": body["prompt"]}
        choice |= {"logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
        return web.json_response({"object": "text_completion", "model": body["model"], "choices": [choice]})

    def _prompted(self, ids, salt):
        """A sequence and the ids to append; the keys and values of a prompt's beginning are of whoever asked first."""
        if self.mistake != "stale":
            return Sequence(self.model), ids
        begins = (salt, *ids[:BLOCK])
        if begins not in self.cached:
            self.cached[begins] = Sequence(self.model)
            self.cached[begins].forward(self.model, ids[:BLOCK])
        return copy.deepcopy(self.cached[begins]), ids[BLOCK:]

    def _answer(self, body):
        told = {"tools": body.get("tools"), "add_generation_prompt": True, "tokenize": False}
        text = self.tokenizer.apply_chat_template(body["messages"], **told)
        if self.mistake == "template":
            text = "Be brief.\n" + text
        prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.mistake == "tokenizer":  # letters alone
            prompt = [each for letter in text for each in self.tokenizer(letter, add_special_tokens=False)["input_ids"]]
        seen = prompt
        if self.mistake == "deaf to AGAIN" and body["messages"][-1]["content"] == AGAIN:
            text = self.tokenizer.apply_chat_template(body["messages"][:-1], **told)
            seen = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        sampled, logprobs, reason = self._sampled(seen, body)
        said = self.tokenizer.decode(sampled[:-1] if reason == "stop" else sampled)
        message = rollout.assistant_message(said, reason == "stop", self.calls)
        reason = message.pop("finish_reason")
        reason = reason if self.says_ends else None
        tokens = [self.tokenizer.decode([each]) for each in sampled]
        listed = [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        choice = {"index": 0, "message": message, "logprobs": {"content": listed}, "token_ids": sampled}
        return {
            "object": "chat.completion",
            "model": body["model"],
            "choices": [{**choice, "finish_reason": reason}],
            "prompt_token_ids": prompt,
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)},
        }

    @torch.no_grad()
    def _sampled(self, prompt, body):
        model = self.adapted[body["model"]]
        self.sampled += 1
        if self.mistake == "half" and self.sampled % 2:
            model = self.bare
        heat = body.get("temperature", 1.0) * (1.5 if self.mistake == "hot" else 1.0)
        sequence, ids = self._prompted(prompt, body.get("cache_salt"))
        sampled, logprobs, reason = [], [], "length"
        while len(sampled) < body.get("max_tokens", 16):
            scores = sequence.forward(model, ids)
            known = self._truncated(
                (self._reshaped(scores.float(), {**body, **self.sampling}, prompt, sampled) / heat).log_softmax(-1)
            )
            if (allowed := body.get("allowed_token_ids")) is not None:  # one alone, in `measured_kind`
                known = torch.full_like(scores, -torch.inf).index_fill(0, torch.tensor(allowed), 0.0)
            drawn = int(torch.multinomial(known.exp(), 1, generator=self.generator))
            sampled.append(drawn)
            logprobs.append(float((scores.log_softmax(-1) if self.raw else known)[drawn]))
            ids = [drawn]
            if drawn == self.tokenizer.eos_token_id:
                reason = "stop"
                break
        return sampled, logprobs, reason

    def _reshaped(self, scores, told, prompt, sampled):
        """Logits under the penalties of vLLM."""
        for penalty, seen in (("repetition_penalty", [*prompt, *sampled]), ("presence_penalty", sampled)):
            ids = torch.tensor(sorted(set(seen)), dtype=torch.long)
            if ids.numel() and (value := told.get(penalty)):
                own = scores[ids]
                divided = torch.where(own > 0, own / value, own * value)
                scores = scores.index_copy(0, ids, divided if penalty == "repetition_penalty" else own - value)
        for id in sampled:
            scores[id] -= told.get("frequency_penalty", 0.0)
        return scores

    def _truncated(self, known):
        """Logprobs of what top_k, top_p and min_p leave."""
        order = known.argsort(descending=True)
        mass = known[order].exp().cumsum(-1)
        dropped = torch.zeros(len(known), dtype=torch.bool)
        if "top_k" in self.sampling:
            dropped[order[self.sampling["top_k"] :]] = True
        if "top_p" in self.sampling:
            dropped[order[1:][mass[:-1] >= self.sampling["top_p"]]] = True
        if "min_p" in self.sampling:
            dropped |= known.exp() < self.sampling["min_p"] * known.exp().max()
        return known.masked_fill(dropped, -torch.inf).log_softmax(-1) if dropped.any() else known

    async def _control(self, request):
        raw = await request.read()
        if request.path == "/weight_info":
            return web.json_response({"weight_version": self.version})
        if request.path in PARTS and not self._updating(request.path, raw):
            return web.json_response({"error": {"message": "an update is open, or none is"}}, status=500)
        if request.path == "/update_weights" and self.mistake != "deaf":
            self._load(load_file(json.loads(raw)["update_info"]["path"]))
        if request.path == "/v1/load_lora_adapter":
            self._adapt(**json.loads(raw))
        if request.path == "/v1/unload_lora_adapter":
            del self.adapted[json.loads(raw)["lora_name"]]
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in self.adapted]})
        self.pushes += request.path == "/finish_weight_update"
        return web.json_response({"success": True})

    def _updating(self, path, raw):
        """Whether vLLM would do this part of a push now; a pause that nobody ends lasts."""
        if path in ("/pause", "/resume"):
            (self.going.clear if path == "/pause" else self.going.set)()
            return True
        if self.half == (path == "/start_weight_update"):
            return False
        self.half = path != "/finish_weight_update"
        if not self.half:
            self.version = json.loads(raw or b"{}").get("weight_version", self.version)
            self.versions.append(self.version)
        return True

    def _adapt(self, lora_name, lora_path):
        """Each adapter is merged into a model of its own."""
        from peft import PeftModel

        self.known.append(PeftModel.from_pretrained(copy.deepcopy(self.model), lora_path).merge_and_unload().eval())
        late = self.mistake == "before" and len(self.known) > 1
        if self.mistake == "scaled":
            tuned = PeftModel.from_pretrained(copy.deepcopy(self.model), lora_path)
            for module in tuned.modules():
                if isinstance(getattr(module, "scaling", None), dict):
                    module.scaling.update({name: 2 * scale for name, scale in module.scaling.items()})
            self.known[-1] = tuned.merge_and_unload().eval()
        self.adapted[lora_name] = self.model if self.mistake == "bare" else self.known[-2 if late else -1]

    @torch.no_grad()
    def _load(self, weights):
        head = self.model.get_output_embeddings()
        if self.mistake == "head" and head.weight is self.model.get_input_embeddings().weight:
            head.weight = nn.Parameter(head.weight.clone())
        own = dict(self.model.named_parameters())
        if self.mistake == "restarted" and self.pushes == 2:
            weights = self.first
        for name, value in weights.items():
            if self.mistake == "layer" and ".layers.1." in name:
                continue
            if name in own and not (self.mistake == "head" and own[name] is head.weight):
                own[name].copy_(value)

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(60)
        return self

    def __exit__(self, *_):
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)

    def _serve(self, ready):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main(ready))
        self._loop.close()

    async def _main(self, ready):
        self._done = asyncio.Event()
        app = web.Application(client_max_size=1 << 26, middlewares=[self._keyed])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions/derender", self._derender)
        app.router.add_route("*", "/{path:.*}", self._control)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._done.wait()
        await runner.cleanup()
