"""The proof that ships with the package, so that anyone can run it on their own machine.

`cases` are the rows as data, `oracle` says what must come out, `checks` run inside the ranks that `eprt.ranks` starts.
`eprt doctor --run` prints their results; the project's own tests assert them.

    with WorldPool(4) as pool:
        rows = summarize(pool.run(run_checks, checks=standard_checks(4, Device("cpu"))))
"""
