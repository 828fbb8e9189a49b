"""Parameters that one rank holds whole, such as the matrices of Muon."""
