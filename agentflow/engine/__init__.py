"""Engines: the protocol, the embedded and the remote SGLang, the scripted double, the LangChain chat model."""
