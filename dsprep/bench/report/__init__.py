"""A report and its outputs: pure, from rows to tables, words and a page.

`model`
    Measures, rows, reports.
`comparing`, `sweeping`
    Two measures or reports side by side; the values of a sweep and its knee.
`tables`, `answer`
    Columns and numbers for people; the closing words.
`page`
    The HTML page.
`read_plan`
    A plan of reading, in rows.
"""
