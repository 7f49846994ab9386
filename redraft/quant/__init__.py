"""4-bit expert weights: packing, rounding methods, and the report on what was quantised and how well."""
