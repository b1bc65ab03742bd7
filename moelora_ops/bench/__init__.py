"""The engine of `moelora bench`: checks values, times the ops against this device's ceilings, says which targets are met.

`cells` says what is measured, `inputs` makes it, `values` compares it with the reference, `measure` times `calls` of it,
`floors` and `targets` judge the times, `report` and `plot` show them.
"""
