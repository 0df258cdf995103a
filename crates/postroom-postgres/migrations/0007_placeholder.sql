-- Placeholder: number 7 is written elsewhere.
select 1;
