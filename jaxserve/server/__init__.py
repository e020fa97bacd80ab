"""The OpenAI-compatible HTTP server over `AsyncLLM` (extra [server]: starlette and uvicorn).

`run.HttpServer` is the server with its life from binding to the last drained request; `app.build_app` is the ASGI
application in it. A request passes `middleware` (request id, API key), `endpoint` (body, disconnects, errors),
`completions` or `chat` (from OpenAI's words to prompts and `SamplingParams`, and back), and `service` (the engine).
"""
