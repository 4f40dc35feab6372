"""The endpoint through which foreign agents call the model: the chat interfaces of OpenAI and Anthropic."""
