-- For statements that are written so that a single index gives their order: without sorts and bitmaps, the planner can take no other.
begin read only; set local enable_sort = off; set local enable_bitmapscan = off
