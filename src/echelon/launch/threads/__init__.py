"""Jobs as threads of one process: of a function (`in_process`) or of a script (`launcher`; `output` labels lines)."""
