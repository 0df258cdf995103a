drop schema if exists orders_example cascade;
create schema orders_example;
create table orders_example.customers (name text primary key, orders bigint not null default 0);
insert into orders_example.customers (name) select 'customer-' || n from generate_series(0, 999) n;
create table orders_example.orders (customer text, number bigint, cents bigint, primary key (customer, number));
-- The writers' ledger, written in the business transaction.
create table orders_example.committed (message_id uuid primary key, customer text, number bigint);
-- The shipping service's side: in production another database.
create table orders_example.shipped (customer text primary key, orders bigint, cents bigint);
create table orders_example.effects (message_id uuid primary key, times integer not null);
