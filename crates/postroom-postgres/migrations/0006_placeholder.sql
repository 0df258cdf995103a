-- Placeholder: number 6 is written elsewhere.
select 1;
