"""Parity: does the converted model compute the same numbers?"""
