"""What OpenAI's HTTP API says: request and response bodies, their checks and errors."""
