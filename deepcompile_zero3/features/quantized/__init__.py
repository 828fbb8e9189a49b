"""All-gathers and reduce-scatters of bytes with scales: fp8 and int8."""
