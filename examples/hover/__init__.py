"""Fact checking over several documents: does the evidence support the claim?"""
