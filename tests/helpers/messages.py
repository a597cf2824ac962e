"""Messages, calls of an OpenAI API and files of them, as producers log them."""

import json


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def call(asked, answer, model="m", **more):
    request = {"model": model, "messages": asked, **more}
    choices = [{"index": 0, "finish_reason": "stop", "message": said(answer)}]
    return {"request": request, "response": {"model": model, "choices": choices}}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
