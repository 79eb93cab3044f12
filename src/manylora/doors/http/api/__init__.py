"""OpenAI's HTTP API: request and response bodies, their validation, and errors."""
