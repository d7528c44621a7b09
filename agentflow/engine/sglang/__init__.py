"""The plugin that SGLang loads in its own processes. Only this package knows SGLang's internals."""
