"""The passes fxrl ships; import as ``fxrl.passes``."""

if __name__ != "fxrl.passes":
    raise ImportError("import this package as 'fxrl.passes', not 'passes'")
