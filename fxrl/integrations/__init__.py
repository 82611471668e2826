"""fxrl inside other people's trainers, one module for each."""
