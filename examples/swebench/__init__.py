"""A planner, a coder and a tester that fix bugs in small repositories, scored by SWE-bench's rule."""
