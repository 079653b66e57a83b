"""How each study looks: from its result to a page, which terminal and HTML print."""
