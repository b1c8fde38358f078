"""Parity as a CI job sees it: one verdict, every failure on a line, JUnit XML, GitHub annotations, golden figures."""
