"""The engine of `moelora tune`: configurations of the layer op that are faster than the rules, as tables of `kernels.config`.

`candidates` says what is tried for a shape and a batch size, `compiling` compiles it in parallel processes, `measure` times it,
`search` finds what is faster than the rule at that size and nowhere slower around it, `tables` writes it down.
"""
