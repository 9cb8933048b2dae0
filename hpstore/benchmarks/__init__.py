"""The throughput benchmarks behind `hpstore bench`."""

if not __name__.startswith("hpstore."):
    raise ImportError(f"import hpstore.benchmarks, not {__name__}: see CONTRIBUTING.md")
