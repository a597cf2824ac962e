"""Make calls with images, read them, and render their prompts."""

import base64

import tracegrad as tg
import vlm

START, END, PAD = 640, 641, 642


PICTURES = [vlm.picture(56, 56, 1), vlm.picture(84, 56, 2, kind="JPEG"), vlm.picture(56, 56, 3, kind="WEBP")]

FEATURES = [4, 6, 4]


def url(number):
    return "data:image/png;base64," + base64.b64encode(PICTURES[number]).decode()


def shown(*parts):
    """A user's message of texts and numbers of pictures."""

    def part(each):
        if isinstance(each, str):
            return {"type": "text", "text": each}
        return {"type": "image_url", "image_url": {"url": url(each)}}

    return {"role": "user", "content": [part(each) for each in parts]}


def prompt(tokenizer, *messages):
    """The ids of a prompt as servers give them: each pad as often as its picture has features."""
    rendered = tokenizer.render_ids(list(messages), add_generation_prompt=True).tolist()
    numbers = [
        PICTURES.index(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if "image_url" in part
    ]
    out = []
    for each in rendered:
        out += [PAD] * FEATURES[numbers.pop(0)] if each == PAD and numbers else [each]
    return out


def call(tokenizer, *messages, sampled=(10, 11, 12), **more):
    choice = {"index": 0, "message": {"role": "assistant", "content": tokenizer.decode(list(sampled))}}
    choice |= {"token_ids": list(sampled), "finish_reason": "length"}
    choice["logprobs"] = {"content": [{"token": f"token_id:{each}", "logprob": -0.5} for each in sampled]}
    ids = more.pop("ids", None) or prompt(tokenizer, *messages)
    response = {"object": "chat.completion", "choices": [choice], "prompt_token_ids": ids}
    return {"request": {"messages": list(messages), "temperature": 1.0}, "response": response, **more}


def read(*records):
    return tg.Traces.from_records(list(records))
