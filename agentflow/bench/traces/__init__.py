"""Traces: what workflows asked of an engine, to be replayed, simulated and compared."""

from agentflow.bench.traces.model import Content, Span, Trace, TraceCall, TraceTool, TraceWorkflow

__all__ = ["Content", "Span", "Trace", "TraceCall", "TraceTool", "TraceWorkflow"]
