"""A report and its outputs: pure, from rows to tables, words, CSV and a page.

`model`
    Measures, rows, sweeps, reports.
`comparing`, `sweeping`
    Two measures or reports side by side; the values of a sweep and its knee.
`tables`, `answer`
    Columns, numbers for people, CSV; the closing words.
`page`, `plots`
    The HTML page; its figures.
"""
