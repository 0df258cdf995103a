-- What the five programs work on: the application's own tables. Run it as their owner, after `postroom migrate`, with the roles
-- app_writer and app_consumer made. What these may do in the schema postroom is in docs/grants-writer.sql and docs/grants-consumer.sql.
create table orders (id text primary key, status text not null);
create table bills (order_id text not null);   -- no unique key: an effect that was had twice shows

grant select, insert, update on orders to app_writer;
grant insert on bills to app_consumer;
