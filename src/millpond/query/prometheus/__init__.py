"""Figures of running queries for Prometheus."""
