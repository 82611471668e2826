"""The op behind every region (``op``), what it runs (``kernels``), in ``tiles`` or ``groups``."""
