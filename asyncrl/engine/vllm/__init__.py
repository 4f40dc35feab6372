"""The engine on vLLM, and what runs inside vLLM's own processes."""
