"""Example agents: each is a program to run and a graph to copy from."""
